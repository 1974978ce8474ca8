"""Endless rows of fresh documents. Nothing is stored: the corpus is made as it is read."""

import random

import torch
import torch.nn.functional as F

from corpus import document

SHORT, LONG = 512, 2048
# Documents to choose from when a row is filled.
POOL = 48


class Packer:
    """Packs documents into rows. `start` is the part of the schedule that leans on copying (see `corpus.START`)."""

    def __init__(self, tokenizer, seed):
        self.tokenizer, self.random = tokenizer, random.Random(seed)
        self.short, self.long, self.start = [], [], 0.0

    def one(self):
        """One document: token ids, and which of them the loss counts."""
        ids, keep = [], []
        for text, counts in document(self.random, self.start):
            tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
            ids += tokens
            keep += [counts] * len(tokens)
        return ids, keep

    def refill(self, pool, size):
        """Makes documents until `pool` has enough to choose from; those of no use for any row are dropped."""
        while len(pool) < POOL:
            made = self.one()
            if len(made[0]) <= SHORT:
                self.short.append(made)
            elif len(made[0]) <= LONG:
                self.long.append(made)
            if size > SHORT and len(self.short) > 4096:  # long rows also carry short documents
                self.long.append(self.short.pop())

    def row(self, size):
        """A row of `size` tokens: ids, counted, segment (-1 for padding)."""
        pool = self.short if size <= SHORT else self.long
        ids, keep, segments, number = [], [], [], 0
        while True:
            self.refill(pool, size)
            fit = next((i for i, made in enumerate(pool) if len(made[0]) <= size - len(ids)), None)
            if fit is None:
                break
            made = pool.pop(fit)
            ids += made[0]
            keep += made[1]
            segments += [number] * len(made[0])
            number += 1
        pad = size - len(ids)
        return ids + [0] * pad, keep + [False] * pad, segments + [-1] * pad

    def batch(self, count, size):
        """`count` rows: ids, positions, segments, flat places of the loss, their targets (-100: ignored)."""
        rows = [self.row(size) for _ in range(count)]
        ids, keep, segments = (torch.tensor([row[part] for row in rows]) for part in range(3))
        at = (keep[:, 1:] & (segments[:, 1:] == segments[:, :-1])).nonzero()
        places = count * size // 2  # a fixed shape for the compiler; unused places are ignored
        at = at[torch.randperm(len(at))[:places]].T
        flat, targets = at[0] * size + at[1], ids[at[0], at[1] + 1]
        missing = places - len(flat)
        positions = torch.arange(size).expand(count, size)
        return ids, positions, segments, F.pad(flat, (0, missing)), F.pad(targets, (0, missing), value=-100)
