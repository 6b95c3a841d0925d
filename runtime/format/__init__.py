"""Bytes on disk: layout, manifest, codec, digests."""
