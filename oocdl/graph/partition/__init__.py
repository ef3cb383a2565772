"""Forms layers and cuts them into shards."""
