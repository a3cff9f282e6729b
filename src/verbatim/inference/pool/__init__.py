"""Several replicas behind one `Sampler`."""
