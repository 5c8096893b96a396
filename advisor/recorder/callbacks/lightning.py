"""Callback for Lightning: ``Trainer(callbacks=[AdvisorCallback()])``.

Do not use Lightning's own ``PyTorchProfiler`` at the same time: two profilers crash a process, so
no windows open while another profiler is active."""

from typing import Any

from advisor.recorder.api import Recorder

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:  # the package under its older name
    from pytorch_lightning.callbacks import Callback


class AdvisorCallback(Callback):
    """Callback that records ``Trainer.fit``. Keywords are the recorder's options."""

    def __init__(self, out: str | None = None, **options: Any) -> None:
        super().__init__()
        self.recorder = Recorder(out, **options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start recording."""
        self.recorder.begin("callback")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the recording."""
        self.recorder.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the recording, because training raised."""
        self.recorder.close(exception)
