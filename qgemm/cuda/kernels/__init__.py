"""One module a kernel: the problems it takes, its configs, its template and its launch."""
