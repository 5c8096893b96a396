"""Tells whether weights were updated between two backwards, where no optimizer is seen.

One leaf of the graph stands for all of them: an update changes its version, and what clears
gradients changes or removes its gradient; accumulating does neither between one backward's end and
the next one's begin. That covers updates by hand, optimizers that are compiled, of other libraries
or in other threads. No value of a tensor is read.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

MAX_NODES = 4096
"""So much of a graph is searched for a leaf, once."""


class UpdateProbe:
    """Asked before and after each backward."""

    def __init__(self) -> None:
        self._leaf: Any = None
        self._shape: Any = None
        self._state: Any = None

    def touched(self, args: tuple[Any, ...]) -> bool:
        """A backward begins, of the tensors in the first argument: whether anything was changed
        since the last one ended."""
        try:
            from torch._C import DisableTorchFunction

            with DisableTorchFunction():
                leaf = self._leaf() if self._leaf is not None else None
                if leaf is not None:
                    return self._state is not None and _state(leaf) != self._state
                result = _leaf_of(args[0])
                if result is None:
                    return False
                replaced = self._state is not None and result.shape == self._shape
                self._leaf, self._shape = ref(result), result.shape
                return replaced  # by a new one, as in w = (w - lr * w.grad).detach()
        except (RuntimeError, AttributeError, TypeError, IndexError):
            return False

    def look(self) -> None:
        """It has ended."""
        try:
            from torch._C import DisableTorchFunction

            with DisableTorchFunction():
                leaf = self._leaf() if self._leaf is not None else None
                if leaf is not None:
                    self._state = _state(leaf)
        except (RuntimeError, AttributeError, TypeError):
            self._state = None


def _state(leaf: Any) -> tuple[Any, ...]:
    grad = leaf.grad
    return leaf._version, id(grad), None if grad is None else grad._version


def _leaf_of(outputs: Any) -> Any:
    """A parameter that the outputs depend on, else any leaf."""
    from torch.nn import Parameter

    tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
    todo = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen: set[Any] = set(todo)
    any_leaf = None
    while todo and len(seen) < MAX_NODES:
        node = todo.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            if isinstance(variable, Parameter):
                return variable
            any_leaf = variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return any_leaf
