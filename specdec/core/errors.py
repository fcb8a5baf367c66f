"""The one exception that is the user's to fix."""


class UserError(Exception):
    """Bad input: the message is one line, with what was wrong and what to do.

    The command line prints it and exits with 2; the server answers 4xx in OpenAI's error form.
    """
