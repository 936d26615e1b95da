"""The one error a user of layerwave has to catch."""


class LayerwaveError(Exception):
    """Something the user gave cannot be used.

    The message is one line that names what was got, what was expected, and the remedy. The command line prints it
    and exits with code 2.
    """
