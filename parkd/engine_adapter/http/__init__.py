"""HTTP to other servers, for the engines that are in other processes."""
