"""Callback for Hugging Face Transformers: ``Trainer(callbacks=[AdvisorCallback()])``."""

from typing import Any

from transformers import TrainerCallback

from advisor.recorder.api import Recorder


class AdvisorCallback(TrainerCallback):
    """Callback that records ``Trainer.train``. Keywords are the recorder's options.

    The trainer does not inform its callbacks of an exception. Then the recording ends with the
    process, and what was recorded until then is on disk."""

    def __init__(self, out: str | None = None, **options: Any) -> None:
        super().__init__()
        self.recorder = Recorder(out, **options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start recording."""
        self.recorder.begin("callback")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the recording."""
        self.recorder.close()
