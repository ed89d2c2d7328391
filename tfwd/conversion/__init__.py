"""`tfwd-pretrained`: shows published weights on the command line, and converts them."""
