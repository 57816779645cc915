"""prism-record's side: the coordinator that runs W ranks a few at a time, its reports, and the graph built from their traces."""
