"""``engine completion SHELL``: a script that asks the hidden ``engine complete`` for candidates."""

from __future__ import annotations

import argparse

from engine.contracts.command import OK, Command

BASH = """\
_engine_complete() {
    # bash splits words at '=' and ':': take the line as it was typed instead
    local typed="${COMP_LINE:0:COMP_POINT}"
    local current="${typed##* }"
    local IFS=$'\\n'
    COMPREPLY=($(engine complete -- "$typed" 2>/dev/null))
    local prefix="${current%"${COMP_WORDS[COMP_CWORD]}"}"
    if [[ "${COMP_WORDS[COMP_CWORD]}" == "=" ]]; then prefix="$current"; fi
    COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
    [[ "${COMPREPLY[0]}" == *[=.] ]] && compopt -o nospace
}
complete -F _engine_complete engine
"""
ZSH = """\
#compdef engine
_engine() {
    local -a found
    found=("${(@f)$(engine complete -- "${LBUFFER}" 2>/dev/null)}")
    compadd -Q -S '' -- "${found[@]}"
}
compdef _engine engine
"""
FISH = """\
complete -c engine -f -a '(engine complete -- (commandline -cp) 2>/dev/null)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=sorted(SCRIPTS), help='for bash: eval "$(engine completion bash)"')


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    print(SCRIPTS[flags.shell], end="")
    return OK


COMMAND = Command("Print a completion script for your shell.", _run, _flags, takes_overrides=False)
