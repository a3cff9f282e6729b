"""Chat completions: requests and answers as pure functions, and the client that samples with them."""
