"""The one exception that a tool turns into one line on stderr."""


class PrismError(Exception):
    """A problem that the user can act on.

    ``str(error)`` is "object: problem; remedy"; the tool's name is put in front when it is printed.
    ``status`` is the tool's exit status (1, or 2 for usage). ``detail`` holds further lines (a table), or "".
    """

    def __init__(self, message: str, status: int = 1, detail: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.detail = detail
