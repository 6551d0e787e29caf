"""What guesses ahead: drafters, whose guesses the model confirms or corrects."""
