"""How many terms a loss averages, by its batches."""

from __future__ import annotations

import torch

from shrinkpoint.train.recent_batches import TermCounter, count_terms

TOKENS = torch.arange(24).reshape(4, 6)
PADDED = TOKENS.where(torch.arange(6) < 4, torch.tensor(-100))
IMAGES = torch.randn(4, 3, 2, 2)


def test_labels_that_count_are_a_term_each_and_else_examples_are() -> None:
    for batch, terms in [
        ({"input_ids": TOKENS, "labels": TOKENS}, 24),
        ({"input_ids": TOKENS, "labels": PADDED}, 16),
        ({"input_ids": TOKENS, "labels": torch.arange(4)}, 4),
        ({"input_ids": TOKENS, "labels": torch.randn(4)}, 4),
        ({"input_ids": TOKENS, "labels": PADDED, "shift_labels": PADDED[:, :2]}, 8),
        ({"input_ids": TOKENS}, 4),
        ((IMAGES, torch.tensor([0, 1, -100, 3])), 3),
        ((IMAGES, torch.randn(4, 5)), 4),
        ([TOKENS, TOKENS], 24),
        (TOKENS, 24),
        (IMAGES, 4),
        (torch.tensor(1.0), 1),
        ({"name": "nothing"}, 0),
        (None, 0),
    ]:
        assert int(count_terms(batch)) == terms


def test_a_causal_language_model_has_no_term_for_the_first_token_of_a_row() -> None:
    assert int(count_terms({"labels": PADDED}, shift=True)) == 12
    assert int(count_terms({"labels": torch.arange(4)}, shift=True)) == 4
    assert int(count_terms({"labels": PADDED, "shift_labels": PADDED}, shift=True)) == 16


def test_a_step_has_the_terms_of_all_its_batches_on_all_processes() -> None:
    counter = TermCounter()
    assert counter.terms is None
    counter.add([PADDED, TOKENS], scale=3)
    assert counter.terms == 3 * (16 + 24)
    counter.add([TOKENS, TOKENS], scale=3)
    assert counter.terms == 3 * (40 + 48) / 2
    for _ in range(16):  # the mean forgets what is long ago
        counter.add([TOKENS])
    assert counter.terms == 24
