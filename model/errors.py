"""The one exception that kvfold raises for input it cannot work with."""


class KvfoldError(ValueError):
    """Bad input, said in one line: what is wrong, where, and what to do about it.

    The command line prints the message and exits with status 1; anything else that is raised is a defect of kvfold.
    """
