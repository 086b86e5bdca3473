"""Fingerprint: what of a model a twin cannot follow by sharing."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.modules import module as torch_module

from hf_cb.hf.twins.dispatched import offloaded_modules
from hf_cb.hf.twins.held import OF_GENERATE, Parts, Reading, TooManyObjectsError, differences, within
from hf_cb.hf.twins.twin import all_modules, rope_follows_length

Books = dict[int, Parts]
"""What modules write as they run: place of the module -> parts of what it holds. Other values there mean nothing."""

# Most of torch's own layers hold what they are made with, and nothing else.
_USUAL_SIZES: dict[type[nn.Module], int] = {
    type(made): len(vars(made)) for made in (nn.Linear(1, 1), nn.Embedding(1, 1), nn.ModuleList())
}


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    """Two that match: the twin is as good as new.

    Weights changed in place leave it as it is; a module replaced or added, a hook, a parameter that is another object or
    moved to another dtype or device, do not, nor does whatever else a module holds (`held.py`): values, by which adapters are
    switched, say, tensors, functions, objects with all of their fields. Objects are told apart by weak references, of which
    Python keeps one per object: an id could be used again by something else, a strong one would keep the user's model alive.
    """

    objects: tuple[object, ...]
    state: tuple[object, ...]
    values: dict[int, object]  # of each module, by its place
    books: Books  # whose values are not among them
    is_whole: bool = True  # False: there is too much to look at

    @classmethod
    def of(cls, model: nn.Module, books: Books | None = None) -> Fingerprint:
        """Of the model as it is now, but for its books: some two microseconds per module, which every call waits for."""
        books = books or {}
        try:
            return cls._of(model, books)
        except (TooManyObjectsError, RecursionError):
            return cls((), (), {}, books, is_whole=False)

    @classmethod
    def _of(cls, model: nn.Module, books: Books) -> Fingerprint:
        modules = all_modules(model)
        reading = Reading(modules)
        offloaded = offloaded_modules(modules) if any("_hf_hook" in vars(module) for module in modules) else set()
        objects: list[object] = [weakref.ref(module) for module in modules]
        kinds: dict[type[nn.Module], None] = {}
        state: list[object] = []
        values: dict[int, object] = {}
        for module, place in modules.items():
            kind = type(module)
            kinds[kind] = None
            own = vars(module)
            hooks = own["_forward_hooks"]
            state += (kind, _num_hooks(hooks) if hooks else 0, len(own["_forward_pre_hooks"]))
            if own["_modules"]:  # children can move from one to another
                state.append(tuple([modules.get(child) for child in list(own["_modules"].values()) if child is not None]))
            keeps_books = "rope_type" in own and rope_follows_length(module)  # beyond what the probe would see
            if not keeps_books and len(own) - ("_is_hf_initialized" in own) != _USUAL_SIZES.get(kind):
                without = books.get(place)
                values[place] = reading.values(module, without if place else {**OF_GENERATE, **(without or {})})
            if module in offloaded:
                continue
            # Buffers that the module itself replaces as it runs are not shared, and tell nothing.
            tensors = list(own["_parameters"].values())
            if own["_buffers"] and not keeps_books:
                tensors += list(own["_buffers"].values())
            for tensor in tensors:
                if tensor is not None:
                    objects.append(weakref.ref(tensor))
                    state += (tensor.dtype, tensor.device, tensor.shape)
        for kind in kinds:  # what a class does can be exchanged, too
            state += (kind.forward, kind.__call__)
        state += global_hooks()
        return cls(tuple(objects), tuple(state), values, books)

    def matches(self, other: Fingerprint) -> bool:
        """Whether both are of the same objects in the same state."""
        return self._same_modules(other) and self.values == other.values

    def is_of(self, model: nn.Module) -> bool:
        """Whether it is still the model's."""
        return self.matches(Fingerprint.of(model, self.books))

    def matches_but_for(self, books: Books, other: Fingerprint) -> bool:
        """The same, whatever the modules have written into their books meanwhile."""
        written = self.written(other)
        return self._same_modules(other) and (not written or (bool(books) and within(written, books)))

    def _same_modules(self, other: Fingerprint) -> bool:
        if len(self.objects) != len(other.objects) or self.state != other.state or self.is_whole != other.is_whole:
            return False
        return all(a is b for a, b in zip(self.objects, other.objects, strict=True))

    def written(self, later: Fingerprint) -> Books:
        """What was written between the two."""
        return differences(self.values, later.values) or {}


def _num_hooks(hooks: Mapping[int, object]) -> int:
    """Without those that transformers leaves in a model that was once asked for attentions or hidden states: they do nothing
    in other calls."""
    capturing = "transformers.utils.output_capturing"
    return sum(getattr(hook, "__module__", None) != capturing for hook in list(hooks.values()))


def global_hooks() -> tuple[int, ...]:
    """The numbers of the hooks that torch runs for all modules."""
    return (*torch_module._global_forward_hooks, *torch_module._global_forward_pre_hooks)
