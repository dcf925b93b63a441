"""The one error of the command line."""


class UsageError(ValueError):
    """An option that cannot be: `main` prints the message alone and exits with 2."""
