"""The steps of a compression, one package each; found through entry points, as third parties'
are."""
