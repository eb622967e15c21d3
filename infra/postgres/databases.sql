-- Prefect's database is made by the image (POSTGRES_DB); each of the others has one of its own.
CREATE DATABASE mlflow;
CREATE DATABASE optuna;
