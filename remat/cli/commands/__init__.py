"""The commands: a dataclass each, whose fields are the options and whose call runs it.

`remat.cli.main.COMMANDS` names them and imports the one that was asked for.
"""
