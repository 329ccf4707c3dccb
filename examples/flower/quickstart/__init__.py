"""The quickstart CNN with ten clients, three local epochs and batches of 32."""
