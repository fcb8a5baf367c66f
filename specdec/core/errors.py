"""The exceptions that are the user's to fix."""


class UserError(Exception):
    """Bad input: the message is one line, with what was wrong and what to do.

    The command line prints it and exits with 2; the server answers 4xx in OpenAI's error form.
    """


class TooLarge(UserError):
    """What was configured does not fit: fewer slots, a smaller K or a shorter context may."""
