"""Chat completions: pure functions for requests and answers, and the client that samples with them."""
