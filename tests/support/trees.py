"""Random token trees for hypothesis."""

from hypothesis import strategies as st

from dynatree.common.tree import TokenTree


@st.composite
def random_trees(draw: st.DrawFn, max_nodes: int = 24, max_depth: int = 64, tokens: int = 2048) -> TokenTree:
    """Any tree of up to `max_nodes` nodes, from chains to stars; the tokens are clustered so that some recur."""
    alphabet = st.integers(2, 9) | st.integers(2, tokens - 1)
    token_ids: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    for _ in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.integers(-1, len(token_ids) - 1))
        token = draw(alphabet)
        depth = 1 if parent == -1 else depths[parent] + 1
        if depth <= max_depth and (parent, token) not in zip(parents, token_ids, strict=True):
            token_ids.append(token)
            parents.append(parent)
            depths.append(depth)
    return TokenTree(tuple(token_ids), tuple(parents))
