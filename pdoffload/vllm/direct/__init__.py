"""Device memory straight to chunk files, with no host pool between: `spec` is the entrance."""
