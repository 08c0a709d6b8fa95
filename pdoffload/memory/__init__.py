"""The room of memory: slots (`pool`), where they lie (`host`), the engine's caches (`device`)."""
