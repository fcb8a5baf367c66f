"""The one exception that is the user's to fix."""


class UserError(Exception):
    """Bad input: one line that says what was wrong and what to do.

    The command line prints it and exits with 2; the server answers 4xx in OpenAI's error form.
    """
