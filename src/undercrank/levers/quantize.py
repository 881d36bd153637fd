"""quantize: the weights of whole components in 8 bits or fewer.

Does: gives the denoiser, the text encoders and the VAE, each by a knob of its own, a narrower weight format while they
are loaded, before they are placed: the device never holds the dense form. `int8` and the text encoder's `fp8` are
storage only; `fp8` quantises the activations row by row as well and multiplies in 8 bits; `mxfp8` and `nvfp4` are
torchao's, for GPUs that multiply them. Modulation, embeddings and narrow layers stay dense.

Promises: LOSSY, storage only too: each weight is rounded to 3 or 7 bits.

Costs: loading takes longer, by one pass over the weights. Undone by loading anew.

Measured: see `docs/levers/quantize.md`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from undercrank.levers.formats import FORMATS, ROLES, TORCHAO, Format, converted, role_of
from undercrank.memory import BYTES_PER_VALUE
from undercrank.records import BadInput, Case, Lever, LoadSpec, Promise, Trace

if TYPE_CHECKING:
    from undercrank.rig import Rig

UNASKED = ("auto", "off")


@dataclass(frozen=True, kw_only=True)
class Quantize(Lever):
    name = "quantize"
    knobs = ("transformer_quant", "text_encoder_quant", "vae_quant")
    apart = True
    summary = "weights of fewer bits"

    transformer: str = "auto"
    text_encoder: str = "auto"
    vae: str = "auto"

    KNOB_OF: ClassVar[dict[str, str]] = {role: f"{role}_quant" for role in ROLES}

    def __post_init__(self) -> None:
        for role, word in self.words.items():
            known = self._known(role)
            if word not in (*UNASKED, *known):
                knob = self.KNOB_OF[role]
                raise BadInput(f"{knob}={word}: choose auto, off, {', '.join(known)}", field=knob)

    @staticmethod
    def _known(role: str) -> list[str]:
        return [word for each, word in FORMATS if each == role]

    @classmethod
    def from_wish(cls, wishes: Mapping[str, str]) -> Self:
        return cls(**{role: wishes[knob] for role, knob in cls.KNOB_OF.items() if knob in wishes})

    @classmethod
    def grid(cls, steps: int) -> tuple[tuple[tuple[str, str], ...], ...]:
        """Each component in each of its formats, alone."""
        return tuple(((cls.KNOB_OF[role], word),) for role, word in FORMATS)

    @property
    def words(self) -> dict[str, str]:
        return {"transformer": self.transformer, "text_encoder": self.text_encoder, "vae": self.vae}

    @property
    def chosen(self) -> dict[str, str]:
        """The words of the components that are given a format."""
        return {role: word for role, word in self.words.items() if word not in UNASKED}

    @property
    def formats(self) -> dict[str, Format]:
        return {role: FORMATS[role, word] for role, word in self.chosen.items()}

    @property
    def setting(self) -> str:
        return " ".join(f"{role}={word}" for role, word in self.chosen.items())

    def choices(self, case: Case) -> tuple[Self, ...]:
        """What is named by a wish is all that is done. Else every combination, those of most components first:
        what they do together is measured together."""
        if self.chosen:
            return (replace(self, **{role: "off" for role, word in self.words.items() if word == "auto"}),)
        open_to = [[*self._known(role), "off"] if word == "auto" else ["off"] for role, word in self.words.items()]
        found = [type(self)(**dict(zip(ROLES, words, strict=True))) for words in itertools.product(*open_to)]
        return tuple(sorted((each for each in found if each.chosen), key=lambda each: -len(each.chosen))) or (self,)

    def promises(self, case: Case) -> Promise:
        return Promise.LOSSY

    def lacks(self, case: Case) -> str | None:
        reasons = (
            _lacks(f"{self.KNOB_OF[role]}={self.chosen[role]}", form, case) for role, form in self.formats.items()
        )
        return next((reason for reason in reasons if reason), None)

    def holds(self, case: Case) -> Mapping[str, int]:
        """A format's bytes a value in place of the dtype's; what stays dense is small, and counted with the rest."""
        dense = BYTES_PER_VALUE[case.dtype]
        return {
            role: int(count * min(1.0, self.formats[role].bytes_per_value / dense)) if role in self.formats else count
            for role, count in case.weights.items()
        }

    def configure(self, load: LoadSpec) -> LoadSpec:
        return replace(load, formats=tuple(self.chosen.items()))

    def verify(self, rig: Rig, trace: Trace) -> list[str]:
        """Are the components that a format was chosen for still in it?"""
        parts = {name: part for name, part in rig.pipe.components.items() if hasattr(part, "named_modules")}
        seen = {role: [part for name, part in parts.items() if role_of(name) == role] for role in self.chosen}
        return [
            f"{role} is not in {word}: no effect"
            for role, word in self.chosen.items()
            if not seen[role] or not all(converted(part) for part in seen[role])
        ]


def _lacks(what: str, form: Format, case: Case) -> str | None:
    """What a format needs and this machine has not, with the remedy."""
    if case.device.kind == "cpu":
        if not form.on_cpu:
            return f"{what} needs a GPU that multiplies {form.kind}: choose int8 or fp8 here"
    elif form.capability and (case.device.capability or (0, 0)) < form.capability:
        wanted = ".".join(map(str, form.capability))
        return f"{what} needs a GPU of capability {wanted} or later, which multiplies {form.kind}: choose int8 here"
    if form.needs_torchao and "torchao" not in case.machine.packages:
        return f"{what} needs the package torchao: {TORCHAO}"
    return None
