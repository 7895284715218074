"""A KV cache that holds exactly the entries that it says: flat keys and values per layer, each KV head its own length.

transformers' own layers hold a (B, K, N, d) block, so every head of a layer is as long as the longest and an entry
cannot be taken out of one head alone. Here a layer is a list of pages, and a page is the entries of its cells (a cell
is one KV head of one sequence) one cell after the other, with the slot at which each entry's token was read. Entries
keep their slots, so that causality and windows are tested on true distances however much was evicted. Pages are never
written to: what is appended makes a new last page, what is evicted makes a new page, and whoever still holds the old
one (a snapshot) holds it unchanged. An entry may stand for several tokens, and values may be held as codes in a basis
of each cell, which the layer holds.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from data import BadInput
from eviction.basis import Basis

Storage = Literal["ragged", "padded", "masked"]
BLANK = -1  # slot of an entry that only fills space; an entry of slot j that was evicted by mask alone has -2 - j


@dataclass(frozen=True, eq=False)
class Page:
    """Entries of C cells: keys (N, d), values (N, dv), slots (N,) int32; N = sum(lengths), cell by cell, by slot.

    A slot counts tokens as they were fed, padding included. No query sees an entry of negative slot. values: (N, r)
    codes where the layer has a basis. mass (N,) int32: tokens that each entry stands for; None: one each.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    lengths: tuple[int, ...]
    all_seen: bool = True  # no slot is negative
    mass: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What the page stores: keys, values, slots, and masses if it has any."""
        found = self.keys, self.values, self.slots
        return found if self.mass is None else (*found, self.mass)

    @property
    def masses(self) -> torch.Tensor:
        """(N,) int32: mass, written out where it is 1 throughout."""
        return torch.ones_like(self.slots) if self.mass is None else self.mass


@dataclass(frozen=True, eq=False)
class Padded:
    """The cells of some pages side by side, padded to the longest: keys (C, L, d) and values (C, L, dv or r).

    copied: bytes of keys and values that are a copy and no view. mass (C, L) int32, as a page's; 1 in padding.
    """

    pages: tuple[Page, ...]
    keys: torch.Tensor
    values: torch.Tensor
    lengths: tuple[int, ...]
    copied: int
    mass: torch.Tensor | None = None

    @cached_property
    def slots(self) -> torch.Tensor:
        """(C, L) int32; BLANK in padding. Made when asked for: a decode step over equal lengths needs none."""
        return _spread([page.slots for page in self.pages], self.pages, self.lengths, BLANK)

    def page(self, keep: torch.Tensor, counts: Sequence[int]) -> Page:
        """A page of the entries where keep (C, L) is true, counts[c] of cell c."""
        mass = None if self.mass is None else self.mass[keep]
        return Page(self.keys[keep], self.values[keep], self.slots[keep], tuple(counts), mass=mass)


def joined(pages: Sequence[Page]) -> Page:
    """One page with the entries of all, each cell's in the order of the pages."""
    if len(pages) == 1:
        return pages[0]
    keys, values, slots = (torch.cat(_by_cell([page.tensors[i] for page in pages], pages)) for i in range(3))
    mass = None
    if any(page.mass is not None for page in pages):
        mass = torch.cat(_by_cell([page.masses for page in pages], pages))
    lengths = tuple(map(sum, zip(*(page.lengths for page in pages), strict=True)))
    return Page(keys, values, slots, lengths, all(page.all_seen for page in pages), mass)


def padded(pages: Sequence[Page]) -> Padded:
    """The cells of all pages side by side; a view where one page has cells of one length."""
    lengths = tuple(map(sum, zip(*(page.lengths for page in pages), strict=True)))
    keys = _spread([page.keys for page in pages], pages, lengths, 0)
    values = _spread([page.values for page in pages], pages, lengths, 0)
    view = len(pages) == 1 and len(set(lengths)) == 1
    mass = None
    if any(page.mass is not None for page in pages):
        mass = _spread([page.masses for page in pages], pages, lengths, 1)
    return Padded(tuple(pages), keys, values, lengths, 0 if view else keys.nbytes + values.nbytes, mass)


def _spread(
    tensors: Sequence[torch.Tensor], pages: Sequence[Page], lengths: Sequence[int], filler: int
) -> torch.Tensor:
    """(C, L, ...) from one flat tensor a page, each cell filled up to the longest."""
    longest = max(lengths)
    missing = [longest - length for length in lengths]
    flat = tensors[0]
    if len(tensors) > 1 or any(missing):
        blank = flat.new_full((max(missing), *flat.shape[1:]), filler)
        ends = [blank[:count] for count in missing] if any(missing) else None
        flat = torch.cat(_by_cell(tensors, pages, ends))
    return flat.view(len(lengths), longest, *flat.shape[1:])


def _by_cell(
    tensors: Sequence[torch.Tensor], pages: Sequence[Page], ends: Sequence[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Slices of the flat tensors in the order cell 0 of every page, (its end,) cell 1 of every page, ..."""
    columns = [tensor.split(page.lengths) for tensor, page in zip(tensors, pages, strict=True)]
    if ends is not None:
        columns.append(tuple(ends))
    return [part for cell in zip(*columns, strict=True) for part in cell]


@dataclass(frozen=True, eq=False)
class LayerState:
    """All that a layer holds, for putting it back later; shares the pages and copies nothing."""

    pages: tuple[Page, ...]
    sealed: int
    seen: int
    memory: dict[str, torch.Tensor]
    basis: Basis | None


class RaggedLayer(CacheLayerMixin):
    """One layer's entries. update() only takes new keys and values in; the attention function appends them.

    window: keys that a query of the layer sees, itself included, or None. storage: "ragged", each cell holds what was
    selected; "padded", each cell of the layer as much as the longest; "masked", everything, and what was evicted is
    only never seen again. seen: slots fed so far, which is what transformers counts positions and masks by. basis:
    what the values of every page, and those that are appended, are coded in; None: they are held as they are.
    """

    is_sliding = False  # the mask covers all slots; the attention function looks entries up in it by their slot
    is_croppable = False
    is_compileable = False

    def __init__(self, kv_heads: int, window: int | None = None, storage: Storage = "ragged") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kv_heads, self.window, self.storage = kv_heads, window, storage
        self.closed = False
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.pages: list[Page] = []
        self.sealed = 0  # pages before this one are not appended to: what follows them may be dropped again
        self.seen = 0
        self.memory: dict[str, torch.Tensor] = {}  # what the score keeps between passes
        self.basis: Basis | None = None
        self.incoming: tuple[torch.Tensor, torch.Tensor] | None = None
        self.keys = self.values = None  # the fields of transformers' layers: nothing is kept there
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in (B, K, T, d) keys and values of the tokens being read, and hand them on as they are."""
        if self.closed:
            raise BadInput("the run that this cache belongs to has ended: use it inside its with block")
        if self.incoming is not None:
            raise BadInput("the cache was updated twice without its attention function: use it inside evict() only")
        self.incoming = key_states, value_states
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers every slot that was ever fed."""
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Slots fed, not entries held: positions follow from it."""
        return self.seen

    def get_max_length(self) -> int:
        """No fixed maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Not possible: evicted entries do not come back."""
        raise BadInput("a cache with evicted entries cannot be cropped: assisted generation is not supported")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence b becomes the former sequence beam_idx[b] (beam search)."""
        cells = [sequence * self.kv_heads + head for sequence in beam_idx.tolist() for head in range(self.kv_heads)]
        self.pages = [_of_cells(page, cells) for page in self.pages]
        self.basis = None if self.basis is None else self.basis.of_cells(cells)
        self.memory = {name: tensor[beam_idx.to(tensor.device)] for name, tensor in self.memory.items()}

    @property
    def lengths(self) -> tuple[int, ...]:
        """Entries stored by each cell, sequence by sequence."""
        if not self.pages:
            return ()
        return tuple(map(sum, zip(*(page.lengths for page in self.pages), strict=True)))

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values stored."""
        return sum(page.keys.nbytes + page.values.nbytes for page in self.pages)

    @property
    def seen_lengths(self) -> tuple[int, ...]:
        """Entries of each cell that queries still see: fewer than are stored in padded and masked storage."""
        if all(page.all_seen for page in self.pages):
            return self.lengths
        counts = [[int((part >= 0).sum()) for part in page.slots.split(page.lengths)] for page in self.pages]
        return tuple(map(sum, zip(*counts, strict=True)))

    def append(self, new: Page) -> int:
        """Add entries after those of the last page; bytes of the keys and values that were copied for it.

        Their values come as the model made them, and are coded here if the layer has a basis.
        """
        copied = 0
        if self.basis is not None:
            values = _spread([new.values], [new], new.lengths, 0)
            self.basis = self.basis.completed(values, new.lengths)
            new = _coded(new, values, self.basis)
        if len(self.pages) > self.sealed:
            last = self.pages.pop()
            copied = last.keys.nbytes + last.values.nbytes
            new = joined([last, new])
        self.pages.append(new)
        return copied

    def seal(self) -> None:
        """From now on append to a page of its own, so that what is held now stays as it is in memory."""
        self.sealed = len(self.pages)

    def candidates(self) -> Padded:
        """The entries that queries still see, side by side."""
        return padded([_seen(page) for page in self.pages])

    def values_of(self, held: Padded) -> torch.Tensor:
        """(C, L, dv) values of what the layer holds, decoded if they are codes."""
        return held.values if self.basis is None else self.basis.decoded(held.values)

    def code(self, basis: Basis) -> None:
        """Hold the values in this basis from now on."""
        self.pages = [_coded(page, _spread([page.values], [page], page.lengths, 0), basis) for page in self.pages]
        self.basis = basis

    def hold(self, page: Page) -> None:
        """Hold this page's entries in place of all others."""
        self.pages = [_filled(page) if self.storage == "padded" else page]
        self.seal()

    def hide(self, candidates: Padded, keep: torch.Tensor) -> None:
        """Let queries see of the candidates only where keep (C, L) is true, and let go of nothing."""
        page = joined(self.pages)
        slots = page.slots.clone()
        seen = slots >= 0
        slots[seen] = torch.where(keep[candidates.slots >= 0], slots[seen], -2 - slots[seen])
        self.hold(replace(page, slots=slots, all_seen=False))

    def expire(self) -> None:
        """Drop the entries that no later query sees: in a window w only the last w - 1 are of use."""
        if self.window is None:
            return
        oldest = self.seen - self.window + 1
        if oldest > 0:
            self.pages = [_since(page, oldest) for page in self.pages]
            if self.storage == "padded":
                self.pages = [_filled(page) for page in self.pages]

    def state(self) -> LayerState:
        """What is held now."""
        return LayerState(tuple(self.pages), self.sealed, self.seen, dict(self.memory), self.basis)

    def restore(self, state: LayerState) -> None:
        """Hold again what was held then."""
        self.pages, self.sealed, self.basis = list(state.pages), state.sealed, state.basis
        self.seen, self.memory, self.incoming = state.seen, dict(state.memory), None


@dataclass(frozen=True)
class LayerShape:
    """What the budget must know of a layer: its KV heads, bytes of an entry's key and value, its window or None.

    entry_bytes: as an entry is held once the cache was compressed. read_bytes: as the model makes it, if that differs.
    """

    kv_heads: int
    entry_bytes: int
    window: int | None
    read_bytes: int | None = None

    def holds(self, seen: int) -> int:
        """Entries of a KV head that can be of use after `seen` tokens."""
        return seen if self.window is None else min(seen, self.window - 1)


class RaggedCache(Cache):
    """The layers, and which of the slots fed were tokens and which padding. Pass it to a model as its cache.

    shapes: one per layer. storage: as for RaggedLayer.
    """

    layers: list[RaggedLayer]  # type: ignore[assignment]  # of this kind alone

    def __init__(self, shapes: Sequence[LayerShape], storage: Storage = "ragged") -> None:
        super().__init__(layers=[RaggedLayer(shape.kv_heads, shape.window, storage) for shape in shapes])
        self.shapes = tuple(shapes)
        self.padding = Padding()
        self.followers: list[Callable[[torch.Tensor], None]] = []  # told of a new order of the sequences

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence b becomes the former sequence beam_idx[b], in all that is kept of it."""
        for layer in self.layers:
            layer.reorder_cache(beam_idx)
        self.padding.reorder(beam_idx)
        for follow in self.followers:
            follow(beam_idx)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()  # type: ignore[no-untyped-call]
        self.padding = Padding()

    def storages(self, more: Iterable[LayerState] = ()) -> int:
        """Bytes of the unique storages behind all keys and values, those of further states included."""
        layers: list[RaggedLayer | LayerState] = [*self.layers, *more]
        pages = [page for layer in layers for page in layer.pages]
        return unique_bytes(tensor for page in pages for tensor in (page.keys, page.values))

    def side_data(self, more: Iterable[LayerState] = (), tensors_beside: Iterable[torch.Tensor] = ()) -> int:
        """Bytes of the unique storages of all else that is kept: slots, masses, bases, padding, scores' memory, and
        whatever tensors the caller keeps beside the cache."""
        layers: list[RaggedLayer | LayerState] = [*self.layers, *more]
        tensors = [tensor for layer in layers for page in layer.pages for tensor in page.tensors[2:]]
        tensors += [tensor for layer in layers if layer.basis is not None for tensor in layer.basis.tensors]
        tensors += [tensor for layer in layers for tensor in layer.memory.values()]
        return unique_bytes([*tensors, *self.padding.tensors, *tensors_beside])


@dataclass
class Padding:
    """Which slots hold tokens. slots: how many were fed. tokens: how many of them are tokens, per sequence.

    real (B, slots) bool, and index (B, slots) int32, the true position of each slot's token (of the token before, for
    padding); both None as long as none was padding.
    """

    slots: int = 0
    tokens: tuple[int, ...] = ()
    real: torch.Tensor | None = None
    index: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What is stored."""
        return [tensor for tensor in (self.real, self.index) if tensor is not None]

    def extend(self, real: torch.Tensor | None, batch: int, count: int, device: torch.device) -> None:
        """Note `count` further slots; real (B, count) bool, None if all are tokens."""
        before = self.tokens or (0,) * batch
        if real is not None or self.real is not None:
            if self.real is None or self.index is None:
                self.real = torch.ones(batch, self.slots, dtype=torch.bool, device=device)
                self.index = torch.arange(self.slots, dtype=torch.int32, device=device).expand(batch, -1)
            new = torch.ones(batch, count, dtype=torch.bool, device=device) if real is None else real
            start = torch.tensor(before, dtype=torch.int32, device=device)[:, None]
            self.real = torch.cat([self.real, new], dim=1)
            self.index = torch.cat([self.index, start + new.cumsum(1, dtype=torch.int32) - 1], dim=1)
        added = (count,) * batch if real is None else real.sum(1).tolist()
        self.tokens = tuple(a + b for a, b in zip(before, added, strict=True))
        self.slots += count

    def positions(self, slots: torch.Tensor) -> torch.Tensor:
        """True positions (int64) of slots (B, ...): padding is not counted; -1 for negative slots."""
        if self.index is None:
            return slots.long().clamp(min=BLANK)
        flat = slots.long().reshape(slots.shape[0], -1)
        found = self.index.long().gather(1, flat.clamp(min=0, max=self.index.shape[1] - 1))
        return torch.where(flat >= 0, found, BLANK).reshape(slots.shape)

    def reorder(self, order: torch.Tensor) -> None:
        """Sequence b becomes the former sequence order[b]."""
        self.tokens = tuple(self.tokens[b] for b in order.tolist())
        if self.real is not None and self.index is not None:
            self.real, self.index = self.real[order.to(self.real.device)], self.index[order.to(self.index.device)]

    def copy(self) -> "Padding":
        """An independent copy; tensors are never written to and are shared."""
        return replace(self)


def unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages that the tensors live in, each counted once: a slice counts for all that it keeps alive."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def page_of(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, real: torch.Tensor | None) -> Page:
    """A page, with its own storage, of keys (B, K, T, d) and values at slots (T,) int32.

    real (B, T) bool leaves padding tokens out; None: all are tokens.
    """
    batch, kv_heads, count, _ = keys.shape
    if real is None:
        own = [x.clone(memory_format=torch.contiguous_format).flatten(0, 2) for x in (keys, values)]
        return Page(own[0], own[1], slots.repeat(batch * kv_heads), (count,) * (batch * kv_heads))
    everywhere = real[:, None].expand(batch, kv_heads, count)
    lengths = tuple(n for n in real.sum(1).tolist() for _ in range(kv_heads))
    return Page(keys[everywhere], values[everywhere], slots.expand(batch, kv_heads, count)[everywhere], lengths)


def _seen(page: Page) -> Page:
    """The page without the entries that no query sees."""
    return page if page.all_seen else _only(page, page.slots >= 0)


def _since(page: Page, oldest: int) -> Page:
    """The page without entries of slots before `oldest`, evicted by mask or not; the page itself if it has none."""
    slots = torch.where(page.slots < BLANK, -2 - page.slots, page.slots)
    return _only(page, slots >= oldest)


def _only(page: Page, stays: torch.Tensor) -> Page:
    """The entries where stays (N,) is true."""
    lengths = tuple(int(part.sum()) for part in stays.split(page.lengths))
    if lengths == page.lengths:
        return page
    slots = page.slots[stays]
    all_seen = page.all_seen or bool((slots >= 0).all())
    mass = None if page.mass is None else page.mass[stays]
    return Page(page.keys[stays], page.values[stays], slots, lengths, all_seen, mass)


def _filled(page: Page) -> Page:
    """The page with every cell as long as the longest."""
    if len(set(page.lengths)) == 1:
        return page
    spread = padded([page])
    keys, values, slots = (x.flatten(0, 1) for x in (spread.keys, spread.values, spread.slots))
    return Page(keys, values, slots, (spread.slots.shape[1],) * len(page.lengths), all_seen=False)


def _of_cells(page: Page, cells: Sequence[int]) -> Page:
    """The page of these cells, in this order."""
    parts = [tensor.split(page.lengths) for tensor in page.tensors]
    keys, values, slots, *mass = (torch.cat([part[cell] for cell in cells]) for part in parts)
    return Page(keys, values, slots, tuple(page.lengths[cell] for cell in cells), page.all_seen, *mass)


def _coded(page: Page, values: torch.Tensor, basis: Basis) -> Page:
    """The page with codes in place of values; values (C, L, dv): the page's, side by side."""
    codes = basis.coded(values)
    if len(set(page.lengths)) > 1:
        ends = torch.tensor(page.lengths, device=codes.device)[:, None]
        return replace(page, values=codes[torch.arange(codes.shape[1], device=codes.device) < ends])
    return replace(page, values=codes.flatten(0, 1))
