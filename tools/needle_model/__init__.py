"""Training of the shipped model: tokenizer, documents, network, optimisation (extra `train`)."""
