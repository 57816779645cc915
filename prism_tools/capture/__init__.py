"""Inside the user's processes: traced groups, the rendezvous store, the tracer, and the wire to the server that plays the peers."""
