"""Renderer: the base class of every format."""

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any, ClassVar, Final, Generic, TypeVar

from advisor.render.document import DEFAULT as DEFAULT  # noqa: PLC0414 - handed out with Renderer
from advisor.render.document import Document
from advisor.render.document import RenderOptions as RenderOptions  # noqa: PLC0414

Subject = TypeVar("Subject")
DOCUMENT_MODULES: Final = {"Report": "report", "Comparison": "comparison", "TrialReport": "trial"}
"""File of ``documents/`` whose ``build`` makes a subject's document, by the subject's class."""


class Renderer(ABC, Generic[Subject]):
    """Format of a ``Subject``, such as a Report. Renderers are discovered like rules and
    readers: in ``advisor/render/formats/``, and in installed packages, by the entry points of
    :class:`~advisor.render.formats.Formats`. A renderer has no constructor arguments and computes
    nothing."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    """Suffixes, with the dot, of files written in this format by default."""

    @abstractmethod
    def render(self, subject: Subject, options: RenderOptions = DEFAULT) -> str:
        """Return the text, ending in a line feed. Names in it come from traces, so they must be
        escaped for every reader of the text."""


class DocumentRenderer(Renderer[Any]):
    """A format that draws the Document of any subject."""

    def render(self, subject: Any, options: RenderOptions = DEFAULT) -> str:
        if not isinstance(subject, Document):
            home = DOCUMENT_MODULES[type(subject).__name__]
            subject = import_module(f"advisor.render.documents.{home}").build(subject, options)
        return self.draw(subject, options)

    @abstractmethod
    def draw(self, document: Document, options: RenderOptions = DEFAULT) -> str:
        """Draw the text of a document."""
