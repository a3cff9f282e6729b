"""Uses vLLM as a run's sampler: puts servers that the run starts or finds behind one `Sampler`."""
