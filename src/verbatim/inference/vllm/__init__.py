"""vLLM as a run's sampler: servers that the run starts or finds, behind one `Sampler`."""
