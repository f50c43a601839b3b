"""The one exception that kvfold raises for input it cannot work with."""


class KvfoldError(ValueError):
    """Bad input, said in one line: what is wrong, where, and what to do about it.

    The command line prints the message and exits with status 1; anything else that is raised is a defect of kvfold.
    """


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, or its name where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
