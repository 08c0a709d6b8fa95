"""The fs tier: chunk files in a directory, moved by NIXL POSIX. `tier` is the owner's side."""
