"""Layout, manifest, codec, digests: bytes on disk."""
