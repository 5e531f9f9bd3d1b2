"""Can a model's chat template leave its sandbox, or cost more than its limits?

    python tools/attack/templates.py              # both corpora against the template worker, some against a server
    python tools/attack/templates.py --no-server  # without starting `engine serve` (about a minute less)
    python tools/attack/templates.py --cost       # also what the worker adds to an ordinary request

Prints a table and exits with 1 when a bar is missed. Everything stays on this machine; the server, of a copy of the
bundled model, listens on loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from engine.assembly.model_config import bundled_dir
from engine.service.chat_template import ChatTemplate, TemplateFailed, TemplateSource
from engine.service.template_worker import MEMORY_MB, TemplateWorker
from engine.service.turns import Conversation, Turn

CONVERSATION = Conversation((Turn("user", "hi"),))
MAX_CPU_S = 3.0
"""Of all processes for one template: a second for compiling, one for rendering, a start of Python."""
BASE_MB = 40
"""What a process with Jinja takes by itself."""
MAX_GROWTH_MB = 32
"""Of the process that asks, over all attacks."""
MAX_ADDED_MS = 0.3

GADGETS = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    r"{{ ''['\x5f\x5fclass\x5f\x5f'] }}",
    "{{ ''|attr(['__', 'class', '__']|join) }}",
    "{{ ''|attr('__ssalc__'|reverse) }}",
    "{{ ''|attr('%c%cclass%c%c'|format(95, 95, 95, 95)) }}",
    "{{ [].__class__.__base__.__subclasses__() }}",
    "{{ ().__class__.__bases__[0] }}",
    "{{ {}.__class__.__mro__[1].__subclasses__()[132].__init__.__globals__['popen']('id').read() }}",
    "{{ lipsum.__globals__.os.popen('id').read() }}",
    "{{ lipsum['__globals__']['os'] }}",
    "{{ lipsum|attr('__globals__') }}",
    "{{ lipsum.__code__.co_consts }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ joiner.__init__.__globals__.os }}",
    "{{ namespace.__init__.__globals__.os }}",
    "{{ namespace(x=lipsum).x.__globals__ }}",
    "{% set n = namespace() %}{{ n.__dict__ }}{{ n._Namespace__attrs }}",
    "{% set n = namespace() %}{% set n.__class__ = cycler %}{{ n.__class__ }}",
    "{{ range.__class__.__base__ }}",
    "{{ dict.__subclasses__() }}",
    "{{ self.__dict__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ self|attr('_TemplateReference__context') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__.datetime }}",
    "{{ strftime_now.__code__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{m.__class__.__mro__}'.format(m=messages) }}",
    "{{ '{m.__class__}'.format_map({'m': messages}) }}",
    "{% set f = '{0.__class__}'.format %}{{ f(messages) }}",
    "{{ ('{0.__class__}'|attr('format'))(messages) }}",
    "{{ [messages]|map('{0.__class__}'.format)|list }}",
    "{{ [lipsum]|tojson(default='{0.__globals__}'.format) }}",
    "{{ [lipsum]|tojson(cls=cycler) }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ messages|map('attr', '__class__')|list }}",
    "{{ messages|groupby('__class__') }}",
    "{{ messages|sum(attribute='__class__') }}",
    "{{ messages|sort(attribute='__class__') }}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}{{ m._func.__globals__ }}",
    "{% for x in messages %}{{ loop.__class__ }}{{ loop._iterable }}{% endfor %}",
    "{% set c = cycler('a') %}{{ c.next.__func__.__globals__ }}",
    "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{{ (messages|batch(1)).gi_frame.f_globals }}",
    "{{ (messages|map('upper')).gi_code }}",
    "{{ messages.append(1) }}{{ messages[0].update({'role': 'system'}) }}",
    "{{ messages[0].items.__self__.__class__ }}",
    "{{ config }}{{ request.application.__globals__ }}{{ url_for.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.environ }}",
    "{% from 'os' import environ %}{{ environ }}",
    "{% debug %}",
)
REACHED = re.compile(r"<(class|module|function|built-in|bound|frame|code|generator|slot|_io)|uid=|root:|environ|\bos\.")
"""What the output of a gadget shows once it has reached Python."""

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
NESTED = "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = [n.x] %}{% endfor %}"
LONG_LIST = "{% set l = range(99999)|list * 500 %}"
BOMBS = {
    "nested ranges without output": LOOP,
    "nested ranges with output": LOOP.replace("{% endfor %}", "x{% endfor %}", 1),
    "a range of 10**9": "{{ range(10**9)|list|length }}",
    "a loop that recurses": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "a loop that recurses twice": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "a macro that recurses": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro that calls itself twice": (
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "macros that call each other": (
        "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}"
    ),
    "callers that recurse": "{% macro a() %}{% call a() %}{% endcall %}{% endmacro %}{{ a() }}",
    "a string times 10**9": "{{ 'a' * 10**9 }}",
    "a string times 10**9, unseen": "{% set x = 'a' * 10**9 %}",
    "a string times 10**18": "{{ 'a' * 10**18 }}",
    "a tuple times 10**9": "{{ ((1,) * 10**9)|length }}",
    "a list in a list, times 10**5": "{{ ([[0] * 10**5] * 10**5)|tojson }}",
    "10 ** 10 ** 9": "{{ 10 ** (10 ** 9) }}",
    "9 ** 9 ** 9": "{{ 9 ** (9 ** 9) }}",
    "a power, at run time": "{% set n = messages|length * 10 %}{{ (n ** (n ** 9)) % 7 }}",
    "digits of a power": "{{ 10 ** 10 ** 4 }}",
    "a number that is squared": (
        "{% set n = namespace(x=2) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}"
    ),
    "center": "{{ 'a'.center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "expandtabs": r"{{ 'a\t'.expandtabs(10**9) }}",
    "translate": "{{ ('a' * 10**6).translate({97: 'b' * 10**4}) }}",
    "encode": "{{ ('a' * 10**8).encode('utf-32') }}",
    "% of a width": "{{ '%1000000000d' % 1 }}",
    "% of a precision": "{{ '%.1000000000f' % 1 }}",
    "format of a width": "{{ '{:1000000000}'.format(1) }}",
    "|format of a width": "{{ '%1000000000s'|format('a') }}",
    "|center": "{{ 'a'|center(10**9) }}",
    "|indent": "{{ 'a'|indent(10**9, true) }}",
    "|batch": "{{ [1]|batch(10**9, 'x')|list|length }}",
    "|slice": "{{ [1]|slice(10**9)|list|length }}",
    "|join": "{{ (['a' * 10**6] * 10**6)|join('b' * 10**6) }}",
    "|replace": "{{ ('a' * 10**5)|replace('a', 'b' * 10**5) }}",
    "|wordwrap": "{{ ('a ' * 10**6)|wordwrap(1) }}",
    "|truncate": "{{ ('a ' * 10**8)|truncate(10**8) }}",
    "|pprint of a deep list": NESTED + "{{ n.x|pprint }}",
    "|pprint of a long list": LONG_LIST + "{{ l|pprint }}",
    "|tojson of a deep list": NESTED + "{{ n.x|tojson }}",
    "|tojson of itself": "{% set n = namespace() %}{% set n.x = n %}{{ n|tojson }}",
    "|tojson with an indent": "{{ [[1]]|tojson(indent=10**9) }}",
    "|xmlattr": "{{ dict(range(99998)|map('string')|batch(2))|xmlattr }}",
    "|sort": LONG_LIST + "{{ l|sort|length }}",
    "|unique": LONG_LIST + "{{ l|unique|list|length }}",
    "|sum of lists": "{{ ([[1] * 1000] * 99999)|sum(start=[])|length }}",
    "|urlize": "{{ ('www.a.' * 10**6)|urlize }}",
    "|striptags": "{{ ('<!--' * 10**6)|striptags }}",
    "|title": "{{ ('a ' * 10**8)|title }}",
    "|map over |map": "{{ range(99999)|map('string')|map('center', 10**5)|list|length }}",
    "lipsum": "{{ lipsum(10**9) }}",
    "a paragraph of lipsum": "{{ lipsum(n=1, min=10**9 - 1, max=10**9) }}",
    "strftime": "{{ strftime_now('%Y' * 10**8) }}",
    "strftime of a width": "{{ strftime_now('%1000000000d') }}",
    "a string that doubles": DOUBLING,
    "a list that doubles": DOUBLING.replace("'ab'", "[1]").replace("~", "+"),
    "two deep lists, compared": NESTED + "{% set a = n.x %}" + NESTED + "{{ a == n.x }}",
    "output of 10**8 characters": "{{ 'a' * 10**8 }}",
    "6,000 nested parentheses": "{{ " + "(" * 6000 + "1" + ")" * 6000 + " }}",
    "6,000 nested lists": "{{ " + "[" * 6000 + "]" * 6000 + " }}",
    "6,000 minus signs": "{{ " + "-" * 6000 + "1 }}",
    "6,000 times not": "{{ " + "not " * 6000 + "1 }}",
    "6,000 filters": "{{ 'a'" + "|upper" * 6000 + " }}",
    "6,000 attributes": "{{ messages" + ".a" * 6000 + " }}",
    "30 nested loops": "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
    "5,000 nested conditions": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "a template of a megabyte": "{{ messages[0].content }}" * 42000,
    "20,000 macros": "".join(f"{{% macro m{i}() %}}{{% endmacro %}}" for i in range(20000)),
    "a number of 10**5 digits": "{{ " + "9" * 10**5 + " }}",
}
AT_START = ("nested ranges without output", "a string times 10**9", "center", "6,000 nested parentheses")
ON_REQUEST = ("nested ranges without output", "a string times 10**9", "a macro that recurses", "a string that doubles")


@dataclass(frozen=True, slots=True)
class Row:
    attack: str
    tried: int
    result: str
    bar: str
    kept: bool


def gadgets() -> Row:
    """Each in the sandbox alone, so that the limits of the worker's process hide no escape from it."""
    escapes = []
    for source in GADGETS:
        try:
            shown = ChatTemplate(TemplateSource(source, {})).render(CONVERSATION.plain())
        except TemplateFailed:
            continue
        if REACHED.search(shown):
            escapes.append(f"{source} shows {shown[:60]!r}")
    return Row("gadgets in the sandbox", len(GADGETS), f"{len(escapes)} escapes {'; '.join(escapes)}", "0", not escapes)


def bombs(say: Callable[[str], None]) -> Iterator[Row]:
    """Each as a template of a worker of its own."""
    before_mb = own_mb()
    missed: list[str] = []
    most_s = 0.0
    outcomes: dict[str, int] = {}
    for name, source in BOMBS.items():
        begun_s = children_cpu_s()
        outcome = tried(source)
        cpu_s = children_cpu_s() - begun_s
        most_s = max(most_s, cpu_s)
        say(f"  {name:<34} {cpu_s:5.2f} s  {outcome}")
        kind = outcome.partition(":")[0]
        outcomes[kind] = outcomes.get(kind, 0) + 1
        if kind == "FAULT":
            missed.append(name)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(outcomes.items()))
    yield Row("bombs in a worker", len(BOMBS), counts, "none ends in a fault", not missed)
    yield Row("  CPU time of one", len(BOMBS), f"{most_s:.2f} s at most", f"<= {MAX_CPU_S:g} s", most_s <= MAX_CPU_S)
    rss_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    bar_mb = MEMORY_MB + BASE_MB
    yield Row("  memory of the process", len(BOMBS), f"{rss_mb:.0f} MB at most", f"<= {bar_mb} MB", rss_mb <= bar_mb)
    grown_mb = own_mb() - before_mb
    bar = f"<= {MAX_GROWTH_MB} MB"
    yield Row("  growth of its parent", len(BOMBS), f"{grown_mb:.0f} MB", bar, grown_mb <= MAX_GROWTH_MB)


def tried(source: str) -> str:
    worker = TemplateWorker(TemplateSource(source, {}))
    try:
        worker.check()
        length = len(worker.render_now(CONVERSATION).text)
        return f"harmless: {length} characters"
    except TemplateFailed as error:
        return f"refused: {str(error)[:70]}"
    except Exception as error:  # what a server would not expect
        return f"FAULT: {type(error).__name__}: {str(error)[:50]}"
    finally:
        worker.close()


def children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def own_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@contextmanager
def model_with(source: str) -> Iterator[Path]:
    """A copy of the bundled model with another chat template."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "model"
        shutil.copytree(bundled_dir(), copy, ignore=shutil.ignore_patterns("drafters", "heldout.txt"))
        config = json.loads((copy / "tokenizer_config.json").read_text())
        (copy / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": source}))
        yield copy


def command(model: Path, port: int) -> list[str]:
    plain = ["device=cpu", "drafter=none", "exporter=[]"]
    return [sys.executable, "-m", "engine.cli.main", "serve", f"model.path={model}", f"server.port={port}", *plain]


def starts() -> Row:
    """A server does not start with these templates, and says so in one line."""
    wrong = []
    for name in AT_START:
        with model_with(BOMBS[name]) as model:
            done = subprocess.run(command(model, 0), capture_output=True, text=True, timeout=120)
        lines = done.stderr.splitlines()
        if done.returncode != 2 or len(lines) != 1 or f": model.path={model}: " not in lines[0]:
            wrong.append(f"{name}: exit code {done.returncode}, {lines[-1:]}")
    result = f"{len(AT_START) - len(wrong)} refused {'; '.join(wrong)}"
    return Row("servers with such a template", len(AT_START), result, "exit code 2, one line", not wrong)


def triggered() -> str:
    """The bundled model's template, with a bomb for every word that asks for one."""
    bundled = json.loads((bundled_dir() / "tokenizer_config.json").read_text())["chat_template"]
    when = "{{% if messages[0].content == '{}' %}}{}{{% endif %}}"
    return "".join(when.format(name, BOMBS[name]) for name in ON_REQUEST) + bundled


def server(say: Callable[[str], None]) -> list[Row]:
    with model_with(triggered()) as model, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        process = subprocess.Popen(command(model, port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return asyncio.run(attacked(process, port, say))
        finally:
            process.kill()
            process.wait()


async def attacked(process: subprocess.Popen[bytes], port: int, say: Callable[[str], None]) -> list[Row]:
    """Eight bombs at a time, and ordinary requests beside them."""
    base = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        await until_ready(session, process, base)

        async def ask(path: str, body: dict[str, Any]) -> tuple[int, float]:
            begun = time.monotonic()
            async with session.post(base + path, json={"model": "model", "max_tokens": 1, **body}) as response:
                await response.read()
                return response.status, time.monotonic() - begun

        def chat(content: str) -> Awaitable[tuple[int, float]]:
            return ask("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})

        def complete() -> Awaitable[tuple[int, float]]:
            return ask("/v1/completions", {"prompt": f"x{time.monotonic()}"})

        for _ in range(5):
            await chat("warm"), await complete()
        bombs = [asyncio.ensure_future(chat(ON_REQUEST[i % len(ON_REQUEST)])) for i in range(8)]
        chats, completions = [], []
        while not all(bomb.done() for bomb in bombs):
            chats.append(await chat(f"ordinary {len(chats)}"))
            completions.append(await complete())
        answers = [bomb.result()[0] for bomb in bombs]
        status, _ = await chat("after")
        say(f"  answers to bombs: {answers}; worst of {len(chats)} chats {max(s for _, s in chats):.2f} s")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        workers = [pid for pid in descendants(process.pid) if "template_child" in command_line(pid)]
    process.send_signal(signal.SIGTERM)
    code = await asyncio.to_thread(process.wait, 60)
    left = [pid for pid in [*children, *workers] if Path(f"/proc/{pid}").exists()]
    ok = [status for status, _ in [*chats, *completions]] + [status]
    slowest_s = max(seconds for _, seconds in chats)
    waited_s = max(seconds for _, seconds in completions)
    return [
        Row("bombs in requests", len(answers), f"{answers.count(400)} get 400", "all", set(answers) == {400}),
        Row("  others meanwhile", len(ok), f"{ok.count(200)} get 200", "all", set(ok) == {200}),
        Row("  slowest completion", len(completions), f"{waited_s:.2f} s", "<= 2 s", waited_s <= 2),
        Row("  slowest chat", len(chats), f"{slowest_s:.2f} s", "<= 0.5 s more", slowest_s <= waited_s + 0.5),
        Row("  processes left behind", len(children), f"{len(left)}, exit code {code}", "0", not left and code == 0),
    ]


def descendants(pid: int) -> list[str]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += (task / "children").read_text().split()
    return found


def command_line(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


async def until_ready(session: aiohttp.ClientSession, process: subprocess.Popen[bytes], base: str) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}")
        try:
            async with session.get(f"{base}/ready") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientConnectionError:
            pass
        await asyncio.sleep(0.1)
    raise SystemExit("the server did not get ready")


LLAMA_LIKE = """{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not tools_in_user_message is defined %}{% set tools_in_user_message = true %}{% endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{% set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if builtin_tools is defined or tools is not none %}{{- "Environment: ipython\n" }}{% endif %}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content']|trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("only one tool call at once") }}{% endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' + (tool_call.arguments | tojson) + "}" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{% endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""


def cost(say: Callable[[str], None]) -> Iterator[Row]:
    """What a worker adds to the rendering of a conversation, and what it takes to have one."""
    bundled = json.loads((bundled_dir() / "tokenizer_config.json").read_text())["chat_template"]
    asked, answered = (f"turn {i} " + "word " * 100 for i in (0, 1))
    turns = [Turn("user", asked), *(Turn("assistant", answered), Turn("user", asked)) * 20]
    for name, text, conversation in (
        ("the bundled template, 1 turn", bundled, CONVERSATION),
        ("a long template, 41 turns", LLAMA_LIKE, Conversation(tuple(turns))),
    ):
        source = TemplateSource(text, {"bos_token": "<s>"})
        template, worker = ChatTemplate(source), TemplateWorker(source)
        begun = time.monotonic()
        worker.check()
        ready_ms = (time.monotonic() - begun) * 1e3
        alone = timed_ms(lambda: in_thread(lambda: template.render(conversation.plain())))  # noqa: B023
        after = timed_ms(lambda: worker.render(conversation))  # noqa: B023
        rss = ", ".join(f"{resident_mb(pid):.0f}" for pid in worker.pids)
        say(f"  {name}: {alone:.3f} ms in a thread, {after:.3f} ms in a worker, ready in {ready_ms:.0f} ms, {rss} MB")
        worker.close()
        bar = f"<= {MAX_ADDED_MS} ms"
        yield Row(f"cost of {name}", 2000, f"{after - alone:.3f} ms more", bar, after - alone <= MAX_ADDED_MS)


async def in_thread(function: Callable[[], object]) -> None:
    await asyncio.get_running_loop().run_in_executor(None, function)


def timed_ms(call: Callable[[], Awaitable[object]]) -> float:
    """The median of 2,000."""

    async def run() -> float:
        taken = []
        for _ in range(2000):
            begun = time.perf_counter()
            await call()
            taken.append(time.perf_counter() - begun)
            await asyncio.sleep(0.0005)
        return statistics.median(taken) * 1e3

    return asyncio.run(run())


def resident_mb(pid: int) -> float:
    (line,) = re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(line) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-server", action="store_true", help="the worker alone")
    parser.add_argument("--cost", action="store_true", help="also measure latency; needs a machine that is idle")
    flags = parser.parse_args()

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    rows = [gadgets(), *bombs(say)]
    if flags.cost:
        rows += cost(say)
    if not flags.no_server:
        rows += [starts(), *server(say)]
    print(f"{'attack':<42} {'tried':>5}  {'result':<48} bar")
    for row in rows:
        print(f"{row.attack:<42} {row.tried:>5}  {row.result:<48} {row.bar}{'' if row.kept else '   MISSED'}")
    return 0 if all(row.kept for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
