from engine_plugins.command.ladder.record import Ladder


def page(ladder: Ladder) -> str:
    return ladder.model
