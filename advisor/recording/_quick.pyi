from collections.abc import Callable
from typing import Any

def set_up(now: Callable[[], int], tensor: type, device: type, /) -> None: ...
def thread() -> int: ...

class Hook:
    def __new__(
        cls,
        kind: int,
        original: Any,
        slow: Callable[..., Any],
        log: list[Any],
        here: list[int],
        inside: int,
        codes: tuple[int, ...],
        listener: tuple[Callable[[int], None], Callable[[], None], Callable[[], None]],
        aid: Any,
        /,
    ) -> Hook: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
