"""`tfwd-pretrained`: looks at published weights from the command line, and converts them."""
