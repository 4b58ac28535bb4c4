"""The prefix tree: which fully written block holds which tokens after which prefix.

Every edge is labelled with the token ids of one whole block, so a node is one block: a lookup never
splits a node, and giving up a tail is O(1). The label itself is the dictionary key. It is compared
on every hit, so a hash collision costs time and changes nothing else; the built-in hash of bytes is
keyed per process, so a client cannot provoke one either.

Namespaces have a root each: equal tokens under different salts or adapters never meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pocket_backend.kv.eviction import NOT_QUEUED

if TYPE_CHECKING:
    from array import array

BlockKey = Callable[[bytes], bytes]
"""Turns a block's tokens (int32 bytes) into its dictionary key; must keep equality."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Requests share KV only if every part is equal. Each part has its own field, so a salt "x" can
    never be taken for an adapter "x"."""

    salt: str = ""
    """Derived by the front end from the authenticated tenant; a client's own value isolates no one
    from those who can guess it."""
    adapter: str = ""
    model: str = ""


class CacheNode:
    """One cached block, or (``parent is None``) the root of a namespace."""

    __slots__ = (
        "block",
        "children",
        "created",
        "hits",
        "key",
        "last_used",
        "parent",
        "stamp",
    )

    def __init__(self, key: bytes, parent: CacheNode | None, block: int, created: int) -> None:
        self.key = key
        self.parent = parent
        self.block = block
        self.children: dict[bytes, CacheNode] = {}
        self.created = created
        self.last_used = created
        self.hits = 0
        self.stamp = NOT_QUEUED


class Root(CacheNode):
    """Lives while it has children or a sequence that may still insert below it (``users``)."""

    __slots__ = ("namespace", "users")

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(b"", None, -1, 0)
        self.namespace = namespace
        self.users = 0


class RadixPrefixCache:
    """The trees of all namespaces. Knows nothing of reference counts; ``BlockManager`` does.

    Not thread-safe; owned by the block manager.
    """

    __slots__ = ("_block_key", "_clock", "block_size", "node_of", "num_nodes", "roots")

    def __init__(self, num_blocks: int, block_size: int, block_key: BlockKey | None = None) -> None:
        self.block_size = block_size
        self.roots: dict[Namespace, Root] = {}
        self.node_of: list[CacheNode | None] = [None] * num_blocks
        """Indexed by block id; None for a block that is not in any tree."""
        self.num_nodes = 0
        self._clock = 0
        self._block_key = block_key

    def tick(self) -> int:
        """Advance the logical clock that ``created`` and ``last_used`` are read from."""
        self._clock += 1
        return self._clock

    def key(self, tokens: array[int], index: int) -> bytes:
        """Key of the block ``index`` of a token sequence (int32 items)."""
        size = self.block_size
        data = tokens[index * size : (index + 1) * size].tobytes()
        return data if self._block_key is None else self._block_key(data)

    def match(self, namespace: Namespace, tokens: array[int], max_blocks: int) -> list[CacheNode]:
        """The longest cached path along ``tokens``, at most ``max_blocks``. Changes nothing."""
        path: list[CacheNode] = []
        node: CacheNode | None = self.roots.get(namespace)
        if node is None or max_blocks <= 0:
            return path
        data = tokens[: max_blocks * self.block_size].tobytes()
        width = self.block_size * tokens.itemsize
        make_key = self._block_key
        for start in range(0, max_blocks * width, width):
            label = data[start : start + width]
            node = node.children.get(label if make_key is None else make_key(label))
            if node is None:
                break
            path.append(node)
        return path

    def acquire_root(self, namespace: Namespace) -> Root:
        """The namespace's root, kept alive until ``release_root``."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace)
        root.users += 1
        return root

    def release_root(self, root: Root) -> None:
        root.users -= 1
        self._collect(root)

    def insert(self, parent: CacheNode, key: bytes, block: int) -> CacheNode:
        """Add a block below ``parent``, where ``key`` must not exist yet."""
        node = CacheNode(key, parent, block, self.tick())
        parent.children[key] = node
        self.node_of[block] = node
        self.num_nodes += 1
        return node

    def replace_block(self, node: CacheNode, block: int) -> int:
        """Let another block with the same content stand for ``node``; returns the old one."""
        old = node.block
        self.node_of[old] = None
        self.node_of[block] = node
        node.block = block
        return old

    def remove(self, node: CacheNode) -> CacheNode | None:
        """Take a leaf out; returns its parent if that is a block (not a root)."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        self.node_of[node.block] = None
        self.num_nodes -= 1
        if isinstance(parent, Root):
            self._collect(parent)
            return None
        return parent

    def nodes(self) -> Iterator[CacheNode]:
        """Every cached block of every namespace, parents first. For checks only."""
        stack: list[CacheNode] = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def _collect(self, root: Root) -> None:
        # Salts come from outside: an empty namespace must not occupy memory for ever.
        if not root.children and not root.users:
            self.roots.pop(root.namespace, None)
