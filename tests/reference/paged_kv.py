"""A paged KV cache on the host, to fill and to look into."""

import numpy as np


class PagedCache:
    """Pages in random order, all NaN at first: what nobody wrote stays recognisable.

    `num_spare` pages belong to no slot and must stay NaN for ever.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        num_slots: int,
        max_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        num_spare: int = 2,
    ) -> None:
        """Gives every slot all the pages that its row of the table can hold."""
        held = num_slots * max_pages
        pages = rng.permutation(held + num_spare).astype(np.int32)
        self.page_size = page_size
        self.page_table = pages[:held].reshape(num_slots, max_pages).copy()
        self.spare = pages[held:]
        shape = (held + num_spare, num_kv_heads, page_size, head_dim)
        self.keys = np.full(shape, np.nan, np.float32)
        self.values = np.full(shape, np.nan, np.float32)

    def place(self, slot: int, index: int) -> tuple[int, int]:
        """Page and row of kv index `index`."""
        return int(self.page_table[slot, index // self.page_size]), index % self.page_size

    def write(self, slot: int, first: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Writes [num_tokens, num_kv_heads, head_dim] from kv index `first` on."""
        for i, (key, value) in enumerate(zip(keys, values, strict=True)):
            page, row = self.place(slot, first + i)
            self.keys[page, :, row] = key
            self.values[page, :, row] = value

    def read(self, slot: int, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
        """The first `kv_len` keys and values, [kv_len, num_kv_heads, head_dim]."""
        places = [self.place(slot, i) for i in range(kv_len)]
        keys = [self.keys[page, :, row] for page, row in places]
        values = [self.values[page, :, row] for page, row in places]
        return np.array(keys), np.array(values)

    def num_written(self) -> int:
        """Cache rows, of one head each, that hold something."""
        return int((~np.isnan(self.keys)).any(-1).sum())
