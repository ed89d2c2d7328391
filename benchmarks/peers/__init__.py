"""The same work in other libraries, as their users write it."""
