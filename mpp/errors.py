"""The one exception that is meant for the person at the keyboard."""


class UserError(Exception):
    """Something the user can put right. The message is one line that says what is wrong and what to do.

    Recipes print the message alone, without a traceback, and exit with code 2.
    """


class LocalError(UserError):
    """A `UserError` that one process alone may meet, such as an unreadable image: every process prints its own."""
