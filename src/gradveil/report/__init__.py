"""Tables, sentences and pictures of results, for people."""
