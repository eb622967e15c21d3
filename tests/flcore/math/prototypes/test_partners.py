"""Partners of prototypes: of the same client and class, and of another class (fedcspc.md, section 5, 3)."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flcore.math.prototypes.clustering import Partners


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20), st.integers(0, 10**6))
def test_partners(cells: list[tuple[int, int]], seed: int) -> None:
    """Section 5, 3: of the same client where there is one, the same label and not itself, and another label."""
    labels, sources = [label for label, _ in cells], [source for _, source in cells]
    drawn = Partners(torch.tensor(labels), torch.tensor(sources)).draw(4, torch.Generator().manual_seed(seed))
    for item, (label, source) in enumerate(cells):
        alike = [j for j, cell in enumerate(cells) if cell == (label, source) and j != item] or [item]
        unlike = [k for k, cell in enumerate(cells) if cell[0] != label and cell[1] == source]
        anywhere = [k for k, cell in enumerate(cells) if cell[0] != label]
        assert set(drawn.same[item].tolist()) <= set(alike)
        assert bool(drawn.usable[item]) == bool(anywhere)
        if anywhere:
            assert set(drawn.other[item].tolist()) <= set(unlike or anywhere)


def test_every_partner_is_drawn_equally_often() -> None:
    """Item 0 of client 5 (labels 1, 1, 1, 2, 3, 3): partners 1 and 2 of its label, 3, 4, 5 of others.

    2,000 draws: shares 1/2 and 1/3 with standard deviations of 0.011.
    """
    labels, sources = torch.tensor([1, 1, 1, 2, 3, 3, 2]), torch.tensor([5, 5, 5, 5, 5, 5, 6])
    drawn = Partners(labels, sources).draw(2000, torch.Generator().manual_seed(0))
    same_shares = torch.bincount(drawn.same[0], minlength=7) / 2000
    other_shares = torch.bincount(drawn.other[0], minlength=7) / 2000
    assert torch.allclose(same_shares, torch.tensor([0, 1 / 2, 1 / 2, 0, 0, 0, 0]), atol=0.05)
    assert torch.allclose(other_shares, torch.tensor([0, 0, 0, 1 / 3, 1 / 3, 1 / 3, 0]), atol=0.05)


def test_the_partners_of_some() -> None:
    drawn = Partners(torch.tensor([0, 0, 1]), torch.tensor([0, 0, 1])).draw(2, torch.Generator().manual_seed(0))
    rows = torch.tensor([2, 0])
    assert torch.equal(drawn.rows(rows).same, drawn.same[rows])
    assert drawn.rows(rows).other.tolist()[1] == [2, 2]
    assert drawn.rows(rows).usable.tolist() == [[True], [True]]
