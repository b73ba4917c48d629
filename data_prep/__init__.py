"""Text -> documents -> sentences -> token ids -> sentence pairs -> shards. Never imports torch."""
