"""Settings of DistributedDataParallel that cost nothing to set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from advisor.tune.knob import Knob, Machine, Safety
from advisor.tune.patch import wrap
from advisor.tune.spec import Value


class _Ddp(Knob):
    safety: ClassVar[Safety] = "reordered"

    def change(self, given: dict[str, Any], value: Value) -> None:
        raise NotImplementedError

    def apply(self, value: Value) -> None:
        """Every model that is wrapped from now on."""
        from torch.nn.parallel import DistributedDataParallel

        def make(original: Any) -> Any:
            def __init__(self_: Any, *args: Any, **kwargs: Any) -> None:
                self.change(kwargs, value)
                self.met()
                original(self_, *args, **kwargs)

            return __init__

        wrap(DistributedDataParallel, "__init__", make)


class DdpBuckets(_Ddp):
    """``bucket_cap_mb``: PyTorch's own is 25."""

    id = "ddp-bucket-size"
    title = "size of DDP's buckets"

    def values(self, wanted: int | None, machine: Machine) -> Sequence[Value]:
        """Larger and smaller, MB."""
        return (100, 10)

    def change(self, given: dict[str, Any], value: Value) -> None:
        """See Lever."""
        given["bucket_cap_mb"] = value

    def lines(self, value: Value) -> str:
        """See Lever."""
        return f"DistributedDataParallel(..., bucket_cap_mb={value})"


class DdpStaticGraph(_Ddp):
    """``static_graph=True``."""

    id = "ddp-static-graph"
    title = "DDP told that the graph stays"

    def change(self, given: dict[str, Any], value: Value) -> None:
        """See Lever."""
        given["static_graph"] = True

    def lines(self, value: Value) -> str:
        """See Lever."""
        return "DistributedDataParallel(..., static_graph=True)"


class DdpBucketView(_Ddp):
    """``gradient_as_bucket_view=True``."""

    id = "ddp-bucket-view"
    title = "gradients that live in DDP's buckets"
    safety = "exact"

    def change(self, given: dict[str, Any], value: Value) -> None:
        """See Lever."""
        given["gradient_as_bucket_view"] = True

    def lines(self, value: Value) -> str:
        """See Lever."""
        return "DistributedDataParallel(..., gradient_as_bucket_view=True)"
