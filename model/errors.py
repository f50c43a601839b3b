"""The one exception that kvfold raises for input it cannot work with."""

LONGEST = 300  # characters of another library's message


class KvfoldError(ValueError):
    """Bad input, said in one line: what is wrong, where, and what to do about it.

    The command line prints the message and exits with status 1; anything else that is raised is a defect of kvfold.
    """


def one_line(error: BaseException) -> str:
    """What an exception says on one line of bounded length, or its name where it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
