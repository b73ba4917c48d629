"""Sentence splitting, through `sentencex` (rules per language, from Wikimedia)."""

from __future__ import annotations


def split_sentences(paragraph: str, language: str = "en") -> list[str]:
    """Return the sentences of one paragraph, white space at their ends removed, empty ones left out."""
    from sentencex import segment

    return [s for sentence in segment(language, paragraph) if (s := sentence.strip())]
