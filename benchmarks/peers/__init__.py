"""checkflow beside other ways of making checkpoints: the same training, frequency and durable work for all."""
